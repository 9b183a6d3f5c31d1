#!/usr/bin/env bash
# The main job on a small but complete GLM-5.2: make it, convert it, check it, convert it back, compare.
. "$(dirname "$0")/environment.sh"
make_environment "" transformers tokenizers

demo=${1:-demo}
rm -rf "$demo"
mkdir -p "$demo"
glmconv() {
    echo
    echo "\$ glmconv $*"
    .venv/bin/glmconv "$@"
}

echo "== a GLM-5.2 with dense and MoE layers, shared indexes, an MTP layer and side files"
.venv/bin/python scripts/make_checkpoint.py --model glm-5.2 --size small --out "$demo/hf"

glmconv convert --quiet "$demo/hf" "$demo/megatron" --to megatron
glmconv inspect "$demo/megatron"
glmconv check "$demo/megatron" --hash --values
glmconv check "$demo/megatron" --check-dsa-indexer --against "$demo/hf"
glmconv convert --quiet "$demo/megatron" "$demo/back" --to hf
glmconv diff "$demo/hf" "$demo/back"

echo
echo "== byte for byte (glmconv.json is the manifest that the conversion leaves)"
diff --recursive --exclude glmconv.json "$demo/hf" "$demo/back"
echo "the two directories are the same"
