#!/usr/bin/env bash
# The paper's comparison on the embedded model: a search for the settings of each method, then the comparisons.
#
#     benchmarks/paper_comparison.sh tune|tune2|tune3|tune4|tune5|joint|single|lambda|variate|rest|more OUT [JOBS]
#
#     tune, tune2, tune3, tune4, tune5
#                   learning rate, eta and clip range of each method, prompts per iteration; one seed
#     joint         preference + CLIP: DanceGRPO and MixGRPO, with the optimizer steps of their released scripts (_3,
#                   _4) and with those of the first search, and G2RPO with one and with three granularities; 5 seeds;
#                   models of seeds 0 to 2 also in 4, 8, 16 and 32 steps, those of seed 0 side by side in a figure
#     single        preference only: the same arms, Flow-GRPO, stride 2, a longer G2RPO, decaying learning rates and a
#                   KL term against hacking; 3 seeds
#     lambda        granularities, tail rules, a larger group at equal forwards, noise; 3 seeds
#     variate       granularity as a control variate, stride 3 and stride 2; 3 seeds
#     rest          Flow-GRPO (other eta, a KL term, decaying rates) and its Fast window, update rules; 3 seeds;
#                   Flow-GRPO also in 4, 8, 16 and 32 steps (for results/compare/more_steps, with those of `more`)
#     more          rates that decay to 0 for the path methods, random windows for MixGRPO, MixGRPO-Flash, twice the
#                   iterations, more states from the same forwards, stride 2 at a constant rate, strides 2 and 3 at
#                   T=16, a KL term; 3 seeds; two arms also in 4, 8, 16 and 32 steps
#
# All arms have about the same number of forwards: an iteration of a path method costs a fifth of one of G2RPO, so
# it has five times as many. SEEDS=0,1 replaces the seeds of a stage, ONLY='G2RPO.*|L1' selects arms by name. With
# both, FlowGRPO, FlowGRPO_kl, L2_constant, MixGRPO_cosine, MixGRPO_4_cosine and MixGRPO_cosine_130 have five seeds,
# and MixGRPO_random four. The results are in docs/comparison.md, the numbers in results/compare/ (made smaller by
# benchmarks/slim_runs.py).
set -eu
stage=$1 out=$2 jobs=${3:-16}
cd "$(dirname "$0")/.."
base=results/compare/joint.toml
long="iterations=150 eval_every=50 warmup_iterations=25"   # path methods while tuning
short="iterations=40 eval_every=10"                        # G2RPO while tuning

# Results of the search.
dance="algorithm=dance_grpo update=per_step clip_range=1e-3 lr=5e-6"
mix="algorithm=mix_grpo update=once window=3 lr=2e-5 eta=1.0"
# … with the optimizer steps per iteration of the released scripts.
dance3="algorithm=dance_grpo update=3 clip_range=1e-3 lr=5e-6"
mix4="algorithm=mix_grpo update=4 window=3 lr=1e-5 eta=1.0"
one="algorithm=g2rpo_single train_steps=5 lr=3e-5 eta=1.0"
g2rpo="algorithm=g2rpo train_steps=5 lr=3e-5 eta=1.0"
# Each has 184,000 forwards.
dance_long="iterations=210 eval_every=21 warmup_iterations=25"
mix_long="iterations=306 eval_every=34 warmup_iterations=25"
one_long="iterations=54 eval_every=6"
g2rpo_long="iterations=40 eval_every=5"
flow="algorithm=flow_grpo eta=1.0 lr=2e-5"

arms=()
arm() {  # arm NAME SETTINGS ...
  local name=$1
  shift
  if [[ $name =~ ^(${ONLY:-.*})$ ]]; then arms+=(--arm "$name=$base $*"); fi
}
paper() {  # the arms of the paper's first table
  arm DanceGRPO "$dance $dance_long"
  arm DanceGRPO_3 "$dance3 $dance_long"
  arm MixGRPO "$mix $mix_long"
  arm MixGRPO_4 "$mix4 $mix_long"
  arm G2RPO_1 "$one $one_long"
  arm G2RPO "$g2rpo $g2rpo_long"
}
compare() {  # compare SEEDS [KEY=VALUE ...]: the arms, with these additional settings
  local seeds=${SEEDS:-$1}
  shift
  if [ ${#arms[@]} -eq 0 ]; then echo "no arm of $stage is called $ONLY" >&2; exit 2; fi
  python -m g2rpo compare "${arms[@]}" "$@" --seeds "$seeds" --jobs "$jobs" --out "$out"
}
in_steps() {  # in_steps ARM ...: the base and the finished runs of seeds 0 to 2 of these arms, in 4, 8, 16, 32 steps
  local arm seed models=(tiny) names=base
  for arm; do
    for seed in 0 1 2; do
      if [ -f "$out/runs/$arm/$seed/finished" ]; then
        models+=("$out/runs/$arm/$seed") names="$names,$arm.$seed"
      fi
    done
  done
  if [ ${#models[@]} -gt 1 ]; then
    python -m g2rpo evaluate "${models[@]}" --labels "$names" --prompts world:heldout --limit 256 \
      --guidance 1 --precision tf32 --rewards tiny_preference,tiny_clip,verifier,verifier_strict \
      --steps 4,8,16,32 --batch 256 --out "$out/steps"
    python benchmarks/steps_table.py "$out/steps"
  fi
}

case $stage in
tune)
  for lr in 2e-6 5e-6 1e-5; do arm "dance_lr$lr" "algorithm=dance_grpo update=per_step lr=$lr $long"; done
  for eta in 0.15 0.6; do arm "dance_eta$eta" "algorithm=dance_grpo update=per_step lr=5e-6 eta=$eta $long"; done
  arm dance_clip1e-3 "algorithm=dance_grpo update=per_step lr=5e-6 clip_range=1e-3 $long"
  for lr in 5e-6 1e-5 2e-5; do arm "mix_lr$lr" "algorithm=mix_grpo update=once window=3 lr=$lr $long"; done
  for eta in 0.4 1.0; do arm "mix_eta$eta" "algorithm=mix_grpo update=once window=3 lr=1e-5 eta=$eta $long"; done
  for name in g2rpo_single g2rpo; do
    for lr in 1e-5 2e-5 4e-5; do arm "${name}_lr$lr" "algorithm=$name train_steps=5 lr=$lr $short"; done
    for eta in 0.4 1.0; do
      arm "${name}_eta$eta" "algorithm=$name train_steps=5 lr=2e-5 eta=$eta $short"
    done
  done
  for lr in 5e-6 1e-5; do
    arm "g2rpo_per_step_lr$lr" "algorithm=g2rpo train_steps=5 update=per_step lr=$lr $short"
  done
  compare 100
  ;;
tune2)  # where the best value of the first search was at an edge
  for lr in 1e-5 2e-5 4e-5; do
    arm "dance_once_lr$lr" "algorithm=dance_grpo update=once lr=$lr $long"
  done
  for lr in 5e-6 1e-5; do
    arm "dance_clip1e-2_lr$lr" "algorithm=dance_grpo update=per_step clip_range=1e-2 lr=$lr $long"
  done
  arm dance_clip1e-3_eta0.6 "algorithm=dance_grpo update=per_step clip_range=1e-3 lr=5e-6 eta=0.6 $long"
  arm mix_lr4e-5 "algorithm=mix_grpo update=once window=3 lr=4e-5 $long"
  for eta in 0.4 1.0; do
    arm "mix_lr2e-5_eta$eta" "algorithm=mix_grpo update=once window=3 lr=2e-5 eta=$eta $long"
  done
  for name in g2rpo_single g2rpo; do
    for eta in 1.0 1.4; do
      arm "${name}_lr3e-5_eta$eta" "algorithm=$name train_steps=5 lr=3e-5 eta=$eta $short"
    done
  done
  arm g2rpo_lr3e-5 "algorithm=g2rpo train_steps=5 lr=3e-5 $short"
  compare 100
  ;;
tune3)  # at equal forwards: fewer prompts per iteration and more iterations; only coarse tails; more eta for MixGRPO
  arm mix_lr2e-5_eta1.4 "algorithm=mix_grpo update=once window=3 lr=2e-5 eta=1.4 $long"
  arm mix_lr3e-5_eta1.0 "algorithm=mix_grpo update=once window=3 lr=3e-5 eta=1.0 $long"
  for lr in 1e-5 2e-5; do
    mine="lr=$lr eta=1.0 warmup_iterations=20"
    singular="$mine train_steps=5"
    arm "mix_P4_lr$lr" "algorithm=mix_grpo update=once window=3 $mine prompts_per_iteration=4 \
iterations=300 eval_every=75"
    arm "g2rpo_P2_lr$lr" "algorithm=g2rpo $singular prompts_per_iteration=2 \
iterations=160 eval_every=40"
    arm "g2rpo_P4_lr$lr" "algorithm=g2rpo $singular prompts_per_iteration=4 \
iterations=80 eval_every=20"
    arm "single_P2_lr$lr" "algorithm=g2rpo_single $singular prompts_per_iteration=2 \
iterations=213 eval_every=53"
    coarse="algorithm=g2rpo granularities=[3] $singular"
    arm "L3_P8_lr$lr" "$coarse iterations=138 eval_every=34"
    arm "L3_P4_lr$lr" "$coarse prompts_per_iteration=4 iterations=276 eval_every=69"
  done
  arm g2rpo_P2_lr5e-6 "algorithm=g2rpo train_steps=5 eta=1.0 lr=5e-6 warmup_iterations=20 \
prompts_per_iteration=2 iterations=160 eval_every=40"
  compare 100
  ;;
tune4)  # Flow-GRPO, for the stage rest
  for lr in 5e-6 1e-5 2e-5 4e-5; do arm "flow_lr$lr" "algorithm=flow_grpo eta=0.7 lr=$lr $long"; done
  for eta in 0.4 1.0; do arm "flow_lr2e-5_eta$eta" "algorithm=flow_grpo eta=$eta lr=2e-5 $long"; done
  arm flow_lr1e-5_eta1.0 "algorithm=flow_grpo eta=1.0 lr=1e-5 $long"
  arm flow_lr2e-5_clip1e-3 "algorithm=flow_grpo eta=0.7 lr=2e-5 clip_range=1e-3 $long"
  for lr in 1e-5 2e-5 4e-5; do
    arm "fast_lr$lr" "algorithm=flow_grpo window=3 eta=1.0 lr=$lr $long"
  done
  compare 100
  ;;
tune5)  # DanceGRPO and MixGRPO with their scripts' optimizer steps; DanceGRPO's rate at clip 1e-3
  for lr in 5e-6 1e-5 2e-5; do
    arm "mix_4_lr$lr" "algorithm=mix_grpo update=4 window=3 eta=1.0 lr=$lr $long"
  done
  for lr in 2e-6 5e-6 1e-5; do
    arm "dance_3_lr$lr" "algorithm=dance_grpo update=3 clip_range=1e-3 lr=$lr $long"
  done
  arm dance_3_clip1e-4_lr5e-6 "algorithm=dance_grpo update=3 clip_range=1e-4 lr=5e-6 $long"
  for lr in 1e-6 2e-6 1e-5; do
    arm "dance_clip1e-3_lr$lr" "algorithm=dance_grpo update=per_step clip_range=1e-3 lr=$lr $long"
  done
  compare 100
  ;;
joint)
  paper
  compare 0,1,2,3,4
  table1=(DanceGRPO DanceGRPO_3 MixGRPO MixGRPO_4 G2RPO_1 G2RPO)
  in_steps "${table1[@]}"
  shown=(tiny) titles=base
  for arm in "${table1[@]}"; do
    if [ -f "$out/runs/$arm/0/finished" ]; then
      shown+=("$out/runs/$arm/0") titles="$titles,$arm"
    fi
  done
  if [ ${#shown[@]} -gt 1 ]; then
    python -m g2rpo gallery "${shown[@]}" --labels "$titles" --prompts world:heldout --limit 6 \
      --guidance 1 --precision tf32 --steps 10 --out "$out/gallery"
  fi
  ;;
single)
  paper
  # The forwards of MixGRPO, including those of the update.
  arm G2RPO_1_long "$one iterations=128 eval_every=8"
  arm G2RPO_long "$g2rpo iterations=96 eval_every=8"
  arm FlowGRPO "$flow $dance_long"
  arm FlowGRPO_eta0.7 "$flow eta=0.7 $dance_long"
  arm FlowGRPO_kl "$flow kl_beta=0.04 $dance_long"
  arm L2 "$g2rpo granularities=[2] iterations=96 eval_every=8"
  # Twice the iterations, and decaying rates.
  arm L2_long "$g2rpo granularities=[2] iterations=192 eval_every=16"
  arm G2RPO_long_cosine "$g2rpo lr_schedule=cosine iterations=96 eval_every=8"
  # Does a decaying rate or a KL term to the base reduce hacking?
  arm MixGRPO_cosine "$mix lr_schedule=cosine $mix_long"
  arm MixGRPO_4_cosine "$mix4 lr_schedule=cosine $mix_long"
  arm MixGRPO_random "$mix window_order=random $mix_long"
  arm MixGRPO_kl "$mix kl_beta=0.1 $mix_long"
  arm L2_kl "$g2rpo granularities=[2] kl_beta=0.1 iterations=192 eval_every=16"
  compare 0,1,2 'rewards={tiny_preference=1.0}' 'eval_rewards=["tiny_clip","verifier","verifier_strict"]'
  ;;
lambda)  # rates decay to 0, because a constant rate would be too high for arms with more updates
  falling="lr_schedule=cosine"
  arm L1 "$one $falling $one_long"
  arm L123 "$g2rpo $falling $g2rpo_long"
  for set in 2 3 1,2 1,3; do
    case $set in  # iterations for 184,000 forwards
    2) n=96 ;; 3) n=138 ;; 1,2) n=43 ;; 1,3) n=49 ;;
    esac
    arm "L${set/,/}" "$g2rpo $falling granularities=[$set] iterations=$n eval_every=10"
  done
  arm L3_lr1e-5 "$g2rpo granularities=[3] $falling lr=1e-5 iterations=138 eval_every=10"
  arm L123_paper_tails "$g2rpo $falling iterations=33 eval_every=5 tail_rule=paper"
  arm L1_G16 "$one group_size=16 $falling $g2rpo_long"
  # A mean over granularities is a sum with weights of one third, so fewer advantages reach the clamp.
  arm L123_mean "$g2rpo $falling $g2rpo_long rewards={tiny_preference=0.3333,tiny_clip=0.3333}"
  for noise in antithetic orthogonal; do
    arm "L123_$noise" "$g2rpo $falling $g2rpo_long noise=$noise"
  done
  compare 0,1,2
  ;;
variate)
  controlled() {  # controlled COARSE GROUP_SIZE ITERATIONS
    python benchmarks/control_variate.py "$base" train_steps=5 lr=3e-5 eta=1.0 lr_schedule=cosine \
      iterations="$3" eval_every=6 --coarse "$1" --group-size "$2" --fine 6 \
      --seeds "${SEEDS:-0,1,2}" --jobs "$jobs" --out "$out/$1"
  }
  controlled 3 24 48
  controlled 2 18 45
  ;;
rest)
  arm FlowGRPO "$flow $dance_long"
  for eta in 0.4 0.7; do arm "FlowGRPO_eta$eta" "$flow eta=$eta $dance_long"; done
  arm FlowGRPO_kl "$flow kl_beta=0.04 $dance_long"
  arm FlowGRPO_cosine "$flow lr_schedule=cosine $dance_long"
  arm FlowGRPO_Fast "$flow window=3 $mix_long"
  arm FlowGRPO_Fast_cosine "$flow window=3 lr_schedule=cosine $mix_long"
  arm DanceGRPO_once "$dance update=once lr=2e-5 $dance_long"
  arm G2RPO_per_step "$g2rpo update=per_step lr=1e-5 $g2rpo_long"
  compare 0,1,2
  in_steps FlowGRPO
  ;;
more)
  falling="lr_schedule=cosine"
  arm DanceGRPO_cosine "$dance lr=1e-5 $falling $dance_long"
  arm MixGRPO_cosine "$mix $falling $mix_long"
  arm MixGRPO_4_cosine "$mix4 $falling $mix_long"
  # The rates reach 0 after the forwards of L2_constant, including those of the update.
  arm MixGRPO_cosine_130 "$mix $falling iterations=130 eval_every=13 warmup_iterations=25"
  # Random windows: in order, the window is at steps 5 to 7 from iteration 125 to 224.
  arm MixGRPO_random "$mix window_order=random $mix_long"
  arm MixGRPO_random_cosine "$mix window_order=random $falling $mix_long"
  arm MixGRPO_Flash_cosine "$mix flash=0.4 $falling $mix_long"
  arm G2RPO_twice "$g2rpo $falling iterations=80 eval_every=10"
  arm L1_G4_P24 "$one group_size=4 prompts_per_iteration=24 $one_long"
  arm L1_1of5_P40 "$one steps_per_iteration=1 prompts_per_iteration=40 $one_long"
  arm L2_constant "$g2rpo granularities=[2] iterations=96 eval_every=8"
  arm L2_T16 "$g2rpo $falling granularities=[2] num_steps=16 train_steps=8 iterations=39 eval_every=5"
  # A KL term to the base, against the effect of tails that are too coarse.
  arm L3_kl "$g2rpo granularities=[3] kl_beta=0.1 iterations=138 eval_every=6"
  arm L3_kl_cosine "$g2rpo granularities=[3] kl_beta=0.1 $falling iterations=138 eval_every=6"
  arm L2_kl "$g2rpo granularities=[2] kl_beta=0.1 iterations=96 eval_every=8"
  arm MixGRPO_Flash_kl "$mix flash=0.4 kl_beta=0.1 $falling $mix_long"
  arm L3_T16 "$g2rpo $falling granularities=[3] num_steps=16 train_steps=8 iterations=56 eval_every=7"
  compare 0,1,2
  in_steps L2_constant MixGRPO_cosine
  ;;
*)
  echo "no such stage: $stage" >&2
  exit 2
  ;;
esac
