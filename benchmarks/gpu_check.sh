#!/usr/bin/env bash
# What relpos does on an NVIDIA GPU, in under 8 minutes: the conformance suite of `triton` and `merged`, then
# their times beside torch's attention, FlexAttention and the gather form; records, a table and a picture.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: PYTHON=... benchmarks/gpu_check.sh [--out FOLDER] [--budget SECONDS] [--suite SECONDS]
                                        [--processes NUMBER] [--rehearse]

Needs, in the Python that PYTHON names (default: python3), torch for CUDA and triton; for the suite also
pytest, hypothesis and what tests/conftest.py imports; for the picture matplotlib. relpos itself need not be
installed. On CUDA `merged` skips every case of the suite in float64, for which it has no fused kernel there:
its proof on a GPU is the cases of lower precision.

  --out FOLDER       where gpu-<device>.jsonl, .md and .png go; default: benchmarks/results,
                     and build/gpu-rehearsal for a rehearsal
  --budget SECONDS   of measuring, after which no cell begins; default: 240
  --suite SECONDS    after which the conformance suite is stopped; default: 150
  --processes NUMBER that run a share of the suite each, since most of its time is compiling kernels;
                     default: the cores that are there, 8 at most
  --rehearse         everything in small on the CPU; measures nothing, and its records say so
  --help             this text

Exit status: 0 where the suite passed and both backends ran; 1 where the suite failed or did not run, or a
backend failed or was stopped: what could be measured is there all the same; 2 wrong use, or no GPU.
TEXT
}

wrong_use() {
  echo "error: $1" >&2
  exit 2
}

whole_number() {
  [[ "$2" =~ ^[0-9]{1,5}$ ]] || wrong_use "$1 must be a whole number of seconds; got '$2'. See --help."
}

out=
budget=240
suite=150
processes=()
rehearse=()
while (($#)); do
  case "$1" in
    --out | --budget | --suite | --processes)
      [[ $# -ge 2 && -n "$2" ]] || wrong_use "$1 needs a value. See --help."
      case "$1" in
        --out) out=$2 ;;
        --budget) whole_number "$1" "$2" && budget=$((10#$2)) ;;
        --suite) whole_number "$1" "$2" && suite=$((10#$2)) ;;
        --processes)
          [[ "$2" =~ ^[1-9][0-9]?$ ]] || wrong_use "$1 must be a number from 1 to 99; got '$2'. See --help."
          processes=("$1" "$2")
          ;;
      esac
      shift 2
      ;;
    --rehearse)
      rehearse=(--rehearse)
      shift
      ;;
    --help | -h)
      usage
      exit 0
      ;;
    *) wrong_use "there is no option '$1'. See --help." ;;
  esac
done

benchmarks=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$benchmarks")
python=${PYTHON:-python3}
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
if ((${#rehearse[@]})); then
  # triton's kernels on a CPU, and no threads that wait for each other
  export TRITON_INTERPRET=1 OMP_NUM_THREADS=1
  out=${out:-$root/build/gpu-rehearsal}
else
  unset TRITON_INTERPRET
  out=${out:-$root/benchmarks/results}
fi

command -v "$python" >/dev/null || wrong_use "PYTHON must be a Python; got '$python', which is none."
has() {
  "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"
}
has torch || wrong_use "$python has no torch. Set PYTHON to one that has it."
name=$("$python" "$benchmarks/gpu_device.py" "${rehearse[@]+"${rehearse[@]}"}")
mkdir -p "$out"
records=$out/$name
run=$(date -u +%Y-%m-%dT%H:%M:%SZ)
shared=(--json "$records" --run "$run" "${rehearse[@]+"${rehearse[@]}"}")
status=0

echo "== conformance, $suite s at most"
"$python" "$benchmarks/gpu_conformance.py" --seconds "$suite" \
  "${processes[@]+"${processes[@]}"}" "${shared[@]}" || status=1

echo "== measurements, $budget s"
end=$(($(date +%s) + budget))
# a side that breaks the device ends the process with 3, and the others go on in a new one
for attempt in 1 2 3 4; do
  left=$((end - $(date +%s)))
  left=$((left > 0 ? left : 0))
  code=0
  # the last cell may take longer than the budget; what hangs is stopped
  "$python" "$benchmarks/gpu_limited.py" $((left + 45)) "$python" "$benchmarks/gpu_attention.py" \
    --budget "$left" "${shared[@]}" || code=$?
  ((code == 0)) || status=1
  ((code == 3)) || break
done
((code == 0 || code == 1)) || echo "error: measuring ended with status $code, try $attempt" >&2

echo "== $records"
"$python" "$benchmarks/gpu_table.py" "$records" --table "${records%.jsonl}.md" || status=1
if has matplotlib; then
  "$python" "$benchmarks/plot_gpu.py" "$records" --plot "${records%.jsonl}.png" || status=1
else
  echo "no picture: $python has no matplotlib" >&2
fi
exit "$status"
