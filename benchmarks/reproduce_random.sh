#!/usr/bin/env bash
# `g2rpo reproduce` on random weights of FLUX.1-dev's size: every stage, in minutes on one GPU of 140 GB, offline.
#
#     benchmarks/reproduce_random.sh OUT                          a LoRA on model=random:flux-dev, one GPU
#     benchmarks/reproduce_random.sh OUT flux_tiny_random         the same on a few thousand weights, on a CPU
#     NUM_PROCESSES=2 benchmarks/reproduce_random.sh OUT          two processes
#
# Two iterations of two prompts with 4 denoising steps, of which 2 have noise, at 512 x 512; the reward needs no
# weights. The blocks are not compiled: that would take longer than the run. The first call is interrupted after the
# first iterations and repeated, so that a resume is exercised too. Settings after the recipe are passed on.
set -eu
out=$1 recipe=${2:-flux_lora_1gpu}
shift $(($# > 1 ? 2 : 1))
cd "$(dirname "$0")/.."
small=(
  prompts=world:train prompts_per_iteration=2 iterations=2 num_steps=4 train_steps=2 'granularities=[1,2]' group_size=4
  rewards='{colourfulness=1.0}' num_sample_prompts=1 eval_num_steps=4 sample_every=0 compare_images=0 'loggers=[]'
  checkpoint_every=1 keep_last=2
)
if [ "$recipe" != flux_tiny_random ]; then
  small+=(model=random:flux-dev resolution=512 compile_blocks=false)
fi
launcher=(python -m g2rpo)
if [ "${NUM_PROCESSES:-1}" -gt 1 ]; then
  launcher=(torchrun --nproc-per-node "$NUM_PROCESSES" -m g2rpo)
fi
command=(
  "${launcher[@]}" reproduce "$recipe" out="$out" --criteria benchmarks/reproduce_random.toml "${small[@]}" "$@"
)
# A stop signal as soon as the first iterations are recorded; the command ends with exit code 130.
"${command[@]}" &
first=$!
until [ -f "$out/stages/start.json" ] || ! kill -0 $first 2>/dev/null; do sleep 0.2; done
kill -TERM $first 2>/dev/null || true
code=0
wait $first || code=$?
echo "the first call ended with exit code $code"
time "${command[@]}"
grep -E '^\*\*[0-9]+ checks' "$out/reproduction.md"
