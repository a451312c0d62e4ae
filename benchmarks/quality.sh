#!/usr/bin/env bash
# What methods cost in quality on a model of yours: RULER, LongBench v2 and GSM8K with chain of thought from
# lm-evaluation-harness, and our own generated tasks, for every method at three budgets. One table, one figure.
#
#   benchmarks/quality.sh MODEL [OUT]          a hub id or a folder; results go to OUT, quality-DATE without one
#   benchmarks/quality.sh MODEL OUT --hours 8  fewer documents, so that the GPU is done in about eight hours
#   benchmarks/quality.sh --dry-run [OUT]      every line of this script in minutes: the bundled checkpoint on
#                                              a CPU, a handful of documents, a task of our own, no network
#
# It says what it will run and how many GPU hours that takes before it begins. Run it again with the same OUT to
# go on where it stopped, also from several shells at once, one a GPU: they share the rows. Tasks that the
# installed harness does not have are named and left out.
#
# PYTHON  the interpreter, python3 without one: sfi with its extras eval and plots (RULER also needs the
#         packages wonderwords and nltk), and the data sets of the tasks in the cache or a network
# HEADS   a file of head clusters for synckv, from `sfi tune heads`; without one, neighbors are grouped
# PARTS   a regular expression: only the parts whose names match, such as own or ruler
#
# A part that fails does not stop the others; the last lines give every part's exit code, and the worst is ours.
set -uo pipefail
python=${PYTHON:-python3}
places=() options=()
while (($#)); do
  case $1 in
    --hours) options+=("$1" "${2:?--hours must come with a number}") && shift ;;
    --dry-run) options+=("$1") ;;
    -*) echo "error: option must be --hours or --dry-run, got $1" >&2 && exit 2 ;;
    *) places+=("$1") ;;
  esac
  shift
done
model=bundled
if [[ " ${options[*]} " != *" --dry-run "* ]]; then
  model=${places[0]:?usage: benchmarks/quality.sh MODEL [OUT] [--hours H] or --dry-run [OUT]}
  places=("${places[@]:1}")
fi
out=$(mkdir -p "${places[0]:-quality-$(date -u +%F)}" && cd "${places[0]:-quality-$(date -u +%F)}" && pwd) || exit 1
[[ -e $model ]] && model=$(cd "$(dirname "$model")" && pwd)/$(basename "$model")
[[ -n ${HEADS:-} ]] && options+=(--heads "$(cd "$(dirname "$HEADS")" && pwd)/$(basename "$HEADS")")
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export PYTHONPATH=.:kernels:traces PYTHONUNBUFFERED=1 COLUMNS=200
if [[ " ${options[*]} " == *" --dry-run "* ]]; then
  export CUDA_VISIBLE_DEVICES='' HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
fi

"$python" benchmarks/quality.py plan "$model" "$out" "${options[@]}" || exit
sfi() { eval "\"\$python\" -m sfi_cli $1"; }
part() { # NAME COMMAND: begin it, or go on with it where it has begun, by another shell just now perhaps
  local manifest=$out/$1/manifest.json code=2
  local again="eval --resume --output $(printf %q "$out/$1")"
  if [[ ! -e $manifest ]]; then
    sfi "$2"
    code=$?
    ((code == 2)) && [[ -e $manifest ]] || return "$code"
  fi
  sfi "$again"
}

names=() codes=() seconds=()
while IFS=$'\t' read -r -u 3 name command; do
  [[ $name =~ ${PARTS:-.} ]] || continue
  printf '\n== %s: sfi %s\n' "$name" "$command"
  begin=$SECONDS
  part "$name" "$command"
  code=$?
  names+=("$name") codes+=("$code") seconds+=("$((SECONDS - begin))")
  ((code == 130)) && break # Ctrl-C
done 3< <("$python" benchmarks/quality.py commands "$out")
printf '\n== table and figure\n'
"$python" benchmarks/quality.py table "$out"
worst=$?

printf '\n== summary\n'
for i in "${!names[@]}"; do
  printf '%-18s exit %-3s %4d s\n' "${names[i]}" "${codes[i]}" "${seconds[i]}"
  ((codes[i] > worst)) && worst=${codes[i]}
done
ls -1 "$out"
exit "$worst"
