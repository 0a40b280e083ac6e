#!/usr/bin/env bash
# The paper's comparison on the embedded model: the search for each method's settings.
#
#     benchmarks/paper_comparison.sh tune|tune2 OUT [JOBS]
#
# Arms get about the same forwards: a path method's iteration costs a fifth of G2RPO's, so it makes five times
# as many. docs/comparison.md has what was found, results/compare/ the numbers.
set -u
stage=$1 out=$2 jobs=${3:-16}
cd "$(dirname "$0")/.."
base=results/compare/joint.toml
long="iterations=200 eval_every=50 warmup_iterations=25"   # path methods while tuning
short="iterations=40 eval_every=10"                        # G2RPO while tuning

case $stage in
tune)
  arms=()
  for lr in 2e-6 5e-6 1e-5; do arms+=(--arm "dance_lr$lr=$base algorithm=dance_grpo lr=$lr $long"); done
  for eta in 0.15 0.6; do arms+=(--arm "dance_eta$eta=$base algorithm=dance_grpo lr=5e-6 eta=$eta $long"); done
  arms+=(--arm "dance_clip1e-3=$base algorithm=dance_grpo lr=5e-6 clip_range=1e-3 $long")
  for lr in 5e-6 1e-5 2e-5; do arms+=(--arm "mix_lr$lr=$base algorithm=mix_grpo window=3 lr=$lr $long"); done
  for eta in 0.4 1.0; do arms+=(--arm "mix_eta$eta=$base algorithm=mix_grpo window=3 lr=1e-5 eta=$eta $long"); done
  for name in g2rpo_single g2rpo; do
    for lr in 1e-5 2e-5 4e-5; do arms+=(--arm "${name}_lr$lr=$base algorithm=$name train_steps=5 lr=$lr $short"); done
    for eta in 0.4 1.0; do
      arms+=(--arm "${name}_eta$eta=$base algorithm=$name train_steps=5 lr=2e-5 eta=$eta $short")
    done
  done
  for lr in 5e-6 1e-5; do
    arms+=(--arm "g2rpo_per_step_lr$lr=$base algorithm=g2rpo train_steps=5 update=per_step lr=$lr $short")
  done
  python -m g2rpo compare "${arms[@]}" --seeds 100 --jobs "$jobs" --out "$out"
  ;;
tune2)  # where the first search's best lay at an edge
  arms=()
  for lr in 1e-5 2e-5 4e-5; do
    arms+=(--arm "dance_once_lr$lr=$base algorithm=dance_grpo update=once lr=$lr $long")
  done
  for lr in 5e-6 1e-5; do
    arms+=(--arm "dance_clip1e-2_lr$lr=$base algorithm=dance_grpo clip_range=1e-2 lr=$lr $long")
  done
  arms+=(--arm "dance_clip1e-3_eta0.6=$base algorithm=dance_grpo clip_range=1e-3 lr=5e-6 eta=0.6 $long")
  arms+=(--arm "mix_lr4e-5=$base algorithm=mix_grpo window=3 lr=4e-5 $long")
  for eta in 0.4 1.0; do
    arms+=(--arm "mix_lr2e-5_eta$eta=$base algorithm=mix_grpo window=3 lr=2e-5 eta=$eta $long")
  done
  for name in g2rpo_single g2rpo; do
    for eta in 1.0 1.4; do
      arms+=(--arm "${name}_lr3e-5_eta$eta=$base algorithm=$name train_steps=5 lr=3e-5 eta=$eta $short")
    done
  done
  arms+=(--arm "g2rpo_lr3e-5=$base algorithm=g2rpo train_steps=5 lr=3e-5 $short")
  python -m g2rpo compare "${arms[@]}" --seeds 100 --jobs "$jobs" --out "$out"
  ;;
*)
  echo "no such stage: $stage" >&2
  exit 2
  ;;
esac
