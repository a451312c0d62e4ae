#!/usr/bin/env bash
# All that needs a GPU, each call in under ten minutes. Needs no network and no install.
#
#   PARTS=1 benchmarks/gpu.sh [FOLDER]    what works at all: benchmarks/smoke.py
#   PARTS=2 benchmarks/gpu.sh [FOLDER]    how fast: kernels and Table 1's sweep, decoding of Qwen3's architectures
#   PARTS=3 benchmarks/gpu.sh [FOLDER]    the tests, the kernels' first, a sanitizer, what tracing costs
#   benchmarks/gpu.sh [FOLDER]            all of it in one call, each part with a smaller share of the time
#   benchmarks/gpu.sh --plan              what each part may take; nothing runs
#   benchmarks/gpu.sh --dry-run [FOLDER]  the same on a CPU, tiny, to find this script's own mistakes
#
# One archive, FOLDER/DATE-GPU-runPARTS.tar.gz, is written anew after every part; FOLDER is benchmarks/results.
#
# PYTHON      the interpreter, python3 without one: Python 3.11 or newer with CUDA builds of torch and triton,
#             transformers 5.x and pytest
# SFI_WHEELS  a folder of wheels of what it lacks (nvtx, say), put on the path without pip
# PARTS       1, 2 or 3, or a regular expression: the parts whose names match, such as decode or tests
# BUDGET      seconds for all parts, 540 without one, 900 for a dry run. A part gets of what is left what it has of
#             all limits to come
#
# A part that fails is run once more for 30 seconds, every kernel launch waited for, and does not stop the others.
# The last lines give every part's exit code, 124 or 137 for one that its time ended, and the worst is ours.
set -uo pipefail
dry= plan= folder=
for word in "$@"; do
  case $word in
    --dry-run) dry=--dry-run ;;
    --plan) plan=yes ;;
    -*) echo "error: option must be --dry-run or --plan, got $word" >&2; exit 2 ;;
    *) folder=$word ;;
  esac
done
default=540
[[ -z $dry ]] || default=900 # the interpreter is slow
budget=${BUDGET:-$default} chosen=${PARTS:-.} python=${PYTHON:-python3} again=30
if [[ ! $budget =~ ^[1-9][0-9]*$ ]]; then
  echo "error: BUDGET must be seconds, got $budget" >&2
  exit 2
fi
names=() codes=() seconds=() rest=0 scratch=

part() { # NAME RUN LIMIT MORE COMMAND...; MORE are options of the second, slow try
  local name=$1 run=$2 limit=$3 more=$4
  shift 4
  [[ $chosen =~ ^[123]$ ]] && { [[ $run == "$chosen" ]] || return 0; }
  [[ $chosen =~ ^[123]$ || $name =~ $chosen ]] || return 0
  case $mode in
    count) rest=$((rest + limit)) ;;
    plan)
      limit=$((limit * (budget - SECONDS) / rest))
      printf '%-16s run %s %4d s\n' "$name" "$run" "$limit"
      ;;
    run) run_part "$name" "$limit" "$more" "$@" ;;
  esac
}

run_part() { # NAME LIMIT MORE COMMAND...
  local name=$1 own=$2 more=$3 begin=$SECONDS left=$((budget - SECONDS)) code=124
  shift 3
  local limit=$((own * left / rest))
  rest=$((rest - own))
  if ((limit < 5)); then
    printf '\n== %s: no time left (%d s)\n' "$name" "$left"
  else
    printf '\n== %s: at most %d s\n' "$name" "$limit"
    within "$limit" "$name" "$@"
    code=$?
    if ((code != 0 && code != 124 && code < 128 && budget - SECONDS > again)); then
      printf '\n== %s again: exit code %d, now with every launch waited for\n' "$name" "$code"
      # shellcheck disable=SC2086 # options, word by word
      CUDA_LAUNCH_BLOCKING=1 within "$again" "$name-again" "$@" $more
    fi
  fi
  names+=("$name") codes+=("$code") seconds+=("$((SECONDS - begin))")
  pack_up
}

within() { # SECONDS NAME COMMAND...; what measures keeps its finished rows
  local limit=$1 name=$2
  shift 2
  timeout --signal=INT --kill-after=10 "$limit" "$@" 2>&1 | tee "$work/$name.log"
  return "${PIPESTATUS[0]}"
}

pack_up() {
  local i
  {
    printf '{"parts": {'
    for i in "${!names[@]}"; do
      ((i)) && printf ', '
      printf '"%s": {"exit_code": %d, "seconds": %d}' "${names[i]}" "${codes[i]}" "${seconds[i]}"
    done
    printf '}}\n'
  } >"$work/summary.json"
  tar -czf "$archive.part" -C "$scratch" "$stem" && mv "$archive.part" "$archive"
}

sanitize() { # memcheck finds wild reads and writes, racecheck threads that race in shared memory
  local failed=0
  command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not here"; return 0; }
  compute-sanitizer --tool memcheck --error-exitcode 9 "${pytest[@]}" tests/kernels/test_decode_attention.py \
    -k fast_slow || failed=$?
  compute-sanitizer --tool memcheck --error-exitcode 9 "${pytest[@]}" tests/kernels/test_pack.py || failed=$?
  compute-sanitizer --tool racecheck --error-exitcode 9 "${pytest[@]}" tests/kernels/test_top_k.py || failed=$?
  return "$failed"
}

parts() {
  local ours=("$python" benchmarks/gpu_parts.py) into=(--folder "$work") more="--no-graphs --folder $work/again"
  part smoke 1 300 "--no-graphs --output $work/smoke-again.json" \
    "$python" benchmarks/smoke.py --output "$work/smoke.json" $dry

  part ops 2 160 "--folder $work/again" "${ours[@]}" ops "${into[@]}" $dry
  part decode 2 220 "$more" "${ours[@]}" decode "${into[@]}" $dry
  part decode-chained 2 160 "$more" "${ours[@]}" decode-chained "${into[@]}" $dry
  part decode-eager 2 60 "$more" "${ours[@]}" decode-eager "${into[@]}" $dry
  part decode-baseline 2 60 "$more" "${ours[@]}" decode-baseline "${into[@]}" $dry

  part tests-kernels 3 170 -x "${pytest[@]}" "${workers[@]}" "${few_kernels[@]}" tests/kernels \
    tests/core/measure/test_kernel_bench.py tests/core/measure/test_kernel_bench_gates.py
  part tests-engine 3 120 -x "${pytest[@]}" "${workers[@]}" "${few_engine[@]}" \
    tests/core/engine/test_on_a_gpu.py tests/core/engine/test_triton_backend.py tests/traces/test_timing.py \
    tests/core/generation/test_pick.py tests/core/generation/test_pick.py
  part generate 3 50 "$more" "${ours[@]}" generate "${into[@]}" $dry
  part sanitizer 3 60 "" bash -c "$(declare -p pytest); sanitize"
  part decode-more 3 60 "$more" "${ours[@]}" decode-more "${into[@]}" $dry
  part lossless 3 90 "--folder $work/again" "${ours[@]}" lossless "${into[@]}" $dry
  part overlap 3 30 "$more" "${ours[@]}" overlap "${into[@]}" $dry
  part tracing 3 50 "--output $work/tracing-again.json" "$python" benchmarks/tracing.py --repeats "${turns:-3}" \
    --output "$work/tracing.json" $dry
}

work= pytest=() workers=() few_kernels=() few_engine=() mode=count
parts
if ((rest == 0)); then
  echo "error: PARTS must be 1, 2, 3 or match a part, got $chosen" >&2
  exit 2
fi
if [[ -n $plan ]]; then
  SECONDS=0 mode=plan
  parts
  exit
fi

out=$(mkdir -p "${folder:-$(dirname "${BASH_SOURCE[0]}")/results}" && cd "${folder:-$(dirname "${BASH_SOURCE[0]}")/results}" && pwd) || exit 1
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export PYTHONPATH=.:kernels:traces PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 COLUMNS=160 TORCH_SHOW_CPP_STACKTRACES=1
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 # other people's plugins bring warnings
unset TRITON_INTERPRET
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if [[ -n ${SFI_WHEELS:-} ]]; then
  for wheel in "$SFI_WHEELS"/*.whl; do "$python" -m zipfile -e "$wheel" "$scratch/site"; done
  PYTHONPATH=$PYTHONPATH:$scratch/site
fi
"$python" - "$dry" <<'PYTHON' || exit
import sys
from importlib.util import find_spec
def lacking(names): return [name for name in names.split() if find_spec(name) is None]
if missing := lacking("torch triton transformers typer rich pyarrow pytest"):
    sys.exit(f"error: PYTHON must have {', '.join(missing)}; see SFI_WHEELS")
if missing := lacking("duckdb nvtx xdist"):
    print(f"not here, so what needs them is left out: {', '.join(missing)}")
PYTHON
gpu=cpu-dry-run
[[ -n $dry ]] || gpu=$("$python" -c 'import re, torch
print(re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-"))') || {
  echo "error: torch must see a CUDA device; without one: benchmarks/gpu.sh --dry-run" >&2
  exit 4
}
stem=$(date -u +%F)-$gpu
[[ -z ${PARTS:-} ]] || stem=$stem-run${PARTS//[^a-zA-Z0-9]/}
work=$scratch/$stem archive=$out/$stem.tar.gz
mkdir "$work"

pytest=("$python" -m pytest -q -p no:cacheprovider -W default --tb=short --maxfail=200 -rf --durations=15)
# one process a core compiles the tests' kernels in minutes instead of one after the other; under --dist loadfile
# xdist would give a test that ended its worker to the next one, and so on
"$python" -c 'import xdist' 2>/dev/null &&
  workers=(-p xdist -n "$(($(nproc) < 8 ? $(nproc) : 8))" --max-worker-restart 50)
[[ -z $dry ]] || turns=1 few_kernels=(-k "split_plan or wall_clock") few_engine=(-k "on_a_gpu or test_timing")
export -f sanitize

mode=run
parts
printf '\n== summary\n'
worst=0
for i in "${!names[@]}"; do
  printf '%-18s exit %-3s %4d s\n' "${names[i]}" "${codes[i]}" "${seconds[i]}"
  ((codes[i] > worst)) && worst=${codes[i]}
done
echo "wrote $archive"
exit "$worst"
