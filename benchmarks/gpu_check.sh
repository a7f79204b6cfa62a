#!/usr/bin/env bash
# Check and measure relpos on an NVIDIA GPU, in under 8 minutes: the conformance suite of `triton` and `merged`,
# then their times beside torch's attention, FlexAttention and the gather form; records, a table and a picture.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: PYTHON=... benchmarks/gpu_check.sh [--out FOLDER] [--budget SECONDS] [--suite SECONDS]
                                        [--processes NUMBER] [--rehearse]

Needs, in the Python that PYTHON names (default: python3), torch for CUDA and triton; for the suite also
pytest, pytest-xdist, hypothesis and the imports of tests/conftest.py; for the picture matplotlib. relpos itself
need not be installed. On CUDA `merged` skips every case of the suite in float64, for which it has no fused
kernel there: the cases of lower precision test it.

  --out FOLDER       for gpu-<device>.jsonl, .md and .png; default: benchmarks/results,
                     and build/gpu-rehearsal for a rehearsal
  --budget SECONDS   of measuring, after which no cell begins; default: 240
  --suite SECONDS    after which the conformance suite is stopped; default: 150
  --processes NUMBER that share the cases of the suite, most of whose time is compiling kernels; default: 8
  --rehearse         run everything in small on the CPU; it measures nothing, and its records say so
  --help             this text

Exit status: 0 if the suite passed and both backends ran; 1 if the suite failed or did not run, or a backend
failed or was stopped: everything else is measured all the same; 2 for wrong use, or without a GPU.
TEXT
}

wrong_use() {
  echo "error: $1" >&2
  exit 2
}

out= budget=240 suite=150 processes=8 rehearse=() cells=gpu device=cuda
select="triton or merged"
while (($#)); do
  case "$1" in
    --rehearse) rehearse=(--rehearse) cells=rehearsal ;;
    --help | -h) usage && exit 0 ;;
    --out | --budget | --suite | --processes)
      [[ $# -ge 2 && -n "$2" ]] || wrong_use "$1 needs a value. See --help."
      [[ $1 = --out || "$2" =~ ^[0-9]{1,5}$ ]] || wrong_use "$1 must be a whole number; got '$2'. See --help."
      case "$1" in
        --out) out=$2 ;;
        --budget) budget=$((10#$2)) ;;
        --suite) suite=$((10#$2)) ;;
        --processes) processes=$((10#$2)) ;;
      esac
      shift
      ;;
    *) wrong_use "there is no option '$1'. See --help." ;;
  esac
  shift
done

benchmarks=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$benchmarks")
python=${PYTHON:-python3}
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
if ((${#rehearse[@]})); then
  # triton's kernels on a CPU, and no threads that wait for each other
  export TRITON_INTERPRET=1 OMP_NUM_THREADS=1
  device=cpu select="(triton or merged) and equals_the_reference and about"
  out=${out:-$root/build/gpu-rehearsal}
else
  unset TRITON_INTERPRET
  out=${out:-$root/benchmarks/results}
fi

command -v "$python" >/dev/null || wrong_use "PYTHON must be a Python; got '$python', which is none."
"$python" -c "import torch" 2>/dev/null || wrong_use "$python has no torch. Set PYTHON to one that has it."
name=$("$python" "$benchmarks/machine.py" "${rehearse[@]+"${rehearse[@]}"}")
mkdir -p "$out"
records=$out/$name
shared=(--json "$records" --run "$(date -u +%Y-%m-%dT%H:%M:%SZ)")
report=$(mktemp)
trap 'rm -f "$report"' EXIT
status=0

echo "== conformance, $suite s at most"
# the suite's own settings need plugins that a machine with a GPU may lack
((processes > 1)) && "$python" -c "import xdist" 2>/dev/null && parallel=(-n "$processes") || parallel=()
code=0
(cd "$root" && PYTEST_ADDOPTS='' RELPOS_TEST_DEVICE=$device timeout --signal=INT --kill-after=20 "$suite" \
  "$python" -m pytest tests/conformance -k "$select" -o addopts= -W ignore::pytest.PytestConfigWarning \
  -p no:cacheprovider -q -rfE --tb=short --junit-xml "$report" "${parallel[@]+"${parallel[@]}"}") || code=$?
"$python" "$benchmarks/gpu_conformance.py" "$report" --status "$code" "${shared[@]}" \
  "${rehearse[@]+"${rehearse[@]}"}" || status=1

echo "== measurements, $budget s"
end=$(($(date +%s) + budget))
# a form that breaks the device ends the process with 3, and the others go on in a new one
for attempt in 1 2 3 4; do
  left=$((end - $(date +%s)))
  left=$((left > 0 ? left : 0))
  code=0
  # the last cell may take longer than the budget; a process that hangs is stopped
  timeout --kill-after=10 $((left + 45)) "$python" "$benchmarks/attention.py" --cells "$cells" \
    --budget "$left" "${shared[@]}" || code=$?
  ((code == 0)) || status=1
  ((code == 3)) || break
done
((code == 0 || code == 1)) || echo "error: measuring ended with status $code, try $attempt" >&2

echo "== $records"
"$python" "$benchmarks/table.py" "$records" --out "${records%.jsonl}.md" || status=1
if "$python" -c "import matplotlib" 2>/dev/null; then
  "$python" "$benchmarks/plot.py" "$records" --out "${records%.jsonl}.png" || status=1
else
  echo "no picture: $python has no matplotlib" >&2
fi
exit "$status"
