#!/usr/bin/env bash
# DiffusionNFT on the embedded model with both learned rewards, beside G2RPO with stride 2 and MixGRPO.
#
#     benchmarks/nft_comparison.sh tune OUT [JOBS]     12 runs, seed 100, about 200,000 forwards each with the update
#     benchmarks/nft_comparison.sh joint OUT [JOBS]    the chosen one, seeds 31 to 33, 457,000 forwards for every arm
#
# All arms share results/compare/joint.toml; forwards count the update, a backward as two. The settings of the other
# two arms are those of earlier searches (docs/search.md). docs/comparison.md has the results.
set -eu
stage=$1 out=$2 jobs=${3:-12}
cd "$(dirname "$0")/.."
base=results/compare/joint.toml
arms=()

arm() {  # arm NAME SETTINGS ...
  arms+=(--arm "$1=$base $2")
}

nft="algorithm=nft lr_schedule=cosine ema_decay=0.9"
all="$nft kl_beta=0 iterations=45 eval_every=15 warmup_iterations=3"                      # 4,416 forwards an iteration
four="$nft kl_beta=0 train_levels=4 iterations=80 eval_every=20 warmup_iterations=5"      # 2,496
two="$nft kl_beta=0 train_levels=2 iterations=116 eval_every=29 warmup_iterations=5"      # 1,728
four_kl="$nft train_levels=4 iterations=70 eval_every=35 warmup_iterations=5"             # 2,880

case $stage in
tune)
  for lr in 1e-5 3e-5 1e-4; do arm "nft_all_lr$lr" "$all nft_beta=1.0 lr=$lr"; done
  for lr in 1e-5 3e-5 1e-4; do arm "nft_4_lr$lr" "$four nft_beta=1.0 lr=$lr"; done
  for lr in 1e-5 3e-5 1e-4; do arm "nft_4_beta0.1_lr$lr" "$four nft_beta=0.1 lr=$lr"; done
  arm nft_4_beta0.1_kl "$four_kl nft_beta=0.1 kl_beta=0.1 lr=3e-5"
  arm nft_4_beta0.1_group "$four nft_beta=0.1 advantage_std=group lr=3e-5"
  arm nft_2_beta0.1 "$two nft_beta=0.1 lr=3e-5"
  python3 -m g2rpo compare "${arms[@]}" --seeds 100 --jobs "$jobs" --out "$out"
  ;;
joint)
  arm NFT "$CHOSEN"
  arm G2RPO_stride2 "algorithm=g2rpo granularities=[2] train_steps=5 lr=3e-5 eta=1.0 lr_schedule=cosine \
iterations=226 eval_every=113"
  arm MixGRPO_cosine "algorithm=mix_grpo update=once window=3 lr=2e-5 eta=1.0 lr_schedule=cosine iterations=306 \
eval_every=153 warmup_iterations=25"
  python3 -m g2rpo compare "${arms[@]}" --seeds 31,32,33 --jobs "$jobs" --out "$out"
  ;;
esac
