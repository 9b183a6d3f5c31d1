#!/usr/bin/env bash
# Prove a conversion at a released model's full layer width on one large GPU, in one call:
# make a checkpoint of few layers, convert it, verify it in fp32 and in bf16, print the figures.
#
# Needs: Python >= 3.12 with torch for CUDA, transformers, accelerate, megatron-core >= 0.19 and what
# pyproject.toml lists; about 40 GB in HF_DIR, 40 GB in MEGATRON_DIR, a GPU of 141 GB. No network.
# Settings (defaults): PYTHON python3 · DEVICE cuda · TOKENS 4096 · LAYERS 3 · CHANGES (fields of
# config.json) · HF_DIR in memory · MEGATRON_DIR on disk · OUT for reports · KEEP to keep what was made.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} device=${DEVICE:-cuda} tokens=${TOKENS:-4096} layers=${LAYERS:-3}
hf=${HF_DIR:-/dev/shm/glmconv-wide} megatron=${MEGATRON_DIR:-${TMPDIR:-/tmp}/glmconv-wide}
out=${OUT:-$(mktemp -d)}
# The vocabulary is cut; token ids named in the config have to lie in it.
changes=${CHANGES:-vocab_size=32768}
# One process: its collectives go nowhere.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

step() {
    local name=$1 began=$SECONDS
    shift
    echo "== $name: $*"
    "$@"
    echo "== $name took $((SECONDS - began)) s"
}

# In a machine whose memory grows with use, /dev/shm may start far smaller than the memory is.
need=${NEED:-45000000000}
room() { df --output=avail -B1 "$1" | tail -n 1; }
if [ "$device" != cpu ] && [ "$(room "$(dirname "$hf")")" -lt "$need" ]; then
    mount -o "remount,size=$need" "$(dirname "$hf")" ||
        { echo "$(dirname "$hf") has no room for $need bytes; name another HF_DIR" >&2; exit 3; }
fi

clean() { [ -n "${KEEP:-}" ] || rm -rf "$hf" "$megatron"; }
trap clean EXIT
rm -rf "$hf" "$megatron"

arguments=()
for change in $changes pad_token_id=0 eos_token_id=1; do arguments+=(--change "$change"); done
step make "$python" scripts/wide_checkpoint.py --config tests/data/configs/glm-5.2.json --out "$hf" \
    --layers "$layers" --device "$device" "${arguments[@]}"
step convert "$python" -m glmconv convert "$hf" "$megatron" -j 8 --no-progress
du -sh "$hf" "$megatron"
df -h "$hf" "$megatron"

failed=0
for precision in fp32 bf16; do
    step "verify $precision" "$python" -W ignore -m glmconv verify "$hf" "$megatron" --device "$device" \
        --precision "$precision" --seq-len "$tokens" --random 1 --no-progress --json \
        --report "$out/verify-$precision.html" > "$out/verify-$precision.log" || failed=$?
    tail -n 1 "$out/verify-$precision.log"
    sed -n '/^{/,/^}/p' "$out/verify-$precision.log" > "$out/verify-$precision.json"
    [ -s "$out/verify-$precision.json" ] || continue
    "$python" scripts/wide_summary.py "$out/verify-$precision.json" --config "$hf/config.json" \
        --full tests/data/configs/glm-5.2.json
done
echo "reports in $out; whole call $SECONDS s; exit $failed"
exit "$failed"
