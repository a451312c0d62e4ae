#!/usr/bin/env bash
# sfi in vLLM beside vLLM alone, on one GPU, in ten minutes. Needs no network and installs nothing.
#
#   benchmarks/vllm.sh MODEL [FOLDER]             MODEL is a checkpoint's folder, or its name where it is cached
#   benchmarks/vllm.sh --plan                     what each part may take; nothing runs
#   benchmarks/vllm.sh --dry-run [MODEL [FOLDER]] the same on a CPU, tiny, over the bundled checkpoint
#
# First the versions, then whether a budget that holds the whole context gives vLLM's tokens, then tokens/s at batch
# 1, 8 and 32 and contexts of 8K to 128K, each engine in a process of its own that has the whole GPU. The last lines
# are a table of ratios; FOLDER/DATE-GPU-vllm.json has all numbers, and FOLDER is benchmarks/results.
#
# PYTHON       the interpreter, python3 without one: vLLM 0.32 or 0.33, and sfi's entry point (pip install of sfi)
# LOAD_FORMAT  dummy for random weights of MODEL's architecture: speed without a checkpoint's download
# SFI          more settings of sfi as JSON, such as '{"budget": 1024}'
# BUDGET       seconds for all parts, 570 without one, 1,800 for a dry run
#
# A part that fails does not stop the others; the worst exit code is ours. Points that no time is left for, or whose
# cache does not fit, are said and left out.
set -uo pipefail
dry= plan= words=()
for word in "$@"; do
  case $word in
    --dry-run) dry=--dry-run ;;
    --plan) plan=yes ;;
    -*) echo "error: option must be --dry-run or --plan, got $word" >&2; exit 2 ;;
    *) words+=("$word") ;;
  esac
done
default=570
[[ -z $dry ]] || default=1800 # a CPU that others work on
model=${words[0]:-} folder=${words[1]:-} python=${PYTHON:-python3} budget=${BUDGET:-$default}
if [[ ! $budget =~ ^[1-9][0-9]*$ ]]; then
  echo "error: BUDGET must be seconds, got $budget" >&2
  exit 2
fi
if [[ -z $model$dry$plan ]]; then
  echo "error: MODEL must be given; see the head of benchmarks/vllm.sh" >&2
  exit 2
fi
parts=(versions:20 equality-vllm:80 equality-sfi:80 speed-vllm:180 speed-sfi:180 table:20)
share() { # LIMIT REST -> seconds of what is left
  echo $(($1 * (budget - SECONDS) / $2))
}
rest=0
for part in "${parts[@]}"; do rest=$((rest + ${part#*:})); done
if [[ -n $plan ]]; then
  SECONDS=0
  for part in "${parts[@]}"; do printf '%-14s %4d s\n' "${part%:*}" "$(share "${part#*:}" "$rest")"; done
  exit
fi
out=$(mkdir -p "${folder:-$(dirname "${BASH_SOURCE[0]}")/results}" && cd "${folder:-$(dirname "${BASH_SOURCE[0]}")/results}" && pwd) || exit 1
[[ ! -d $model ]] || model=$(cd "$model" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export PYTHONPATH=.:kernels:traces PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=WARNING
unset TRITON_INTERPRET
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
worst=0
for part in "${parts[@]}"; do
  name=${part%:*} own=${part#*:}
  limit=$(share "$own" "$rest") rest=$((rest - own))
  ((limit > 5)) || limit=5
  printf '\n== %s: at most %d s\n' "$name" "$limit"
  # a part ends by itself when its time is over; one that hangs is ended
  timeout --signal=INT --kill-after=10 "$((limit + 15))" "$python" benchmarks/vllm_parts.py "$name" \
    --model "$model" --folder "$work" --output "$out" --seconds "$limit" \
    --load-format "${LOAD_FORMAT:-auto}" --sfi "${SFI:-{\}}" $dry
  code=$?
  ((code == 0)) || printf '%s: exit code %d\n' "$name" "$code"
  ((code > worst)) && worst=$code
  [[ $name != versions || $code == 0 ]] || exit "$code"
done
exit "$worst"
