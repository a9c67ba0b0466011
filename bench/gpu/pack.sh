#!/usr/bin/env bash
# Make the folder of wheels that a bare GPU machine without a network needs, and print the commands to run there.
#
#     bench/gpu/pack.sh                                   # .whl/, for Python 3.12
#     bench/gpu/pack.sh --python_version 3.11 --out DIR
#
# What is carried follows from pyproject.toml: pip resolves its dependencies (without datasets, which synthetic
# tokens don't need, with torchao). Of these all that is reached without torch, transformers and
# accelerate is carried, but for what these three name themselves: the machine has that. torch and triton are empty
# wheels while pip resolves, or it would look for CUDA. DeepSpeed is built here from its sdist, without its CUDA
# operators: ZeRO steps torch's AdamW, so nothing is compiled there. Needs PyPI and a Python 3.11 with pip 23 or
# newer (PYTHON=...).
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3} python_version=3.12 out=.whl max_mib=64
on_machine=(torch==2.11.0 triton==3.6.0 transformers==5.17.0 accelerate==1.15.0 huggingface_hub==1.33.0) # 2026-11
while (($#)); do
    case $1 in
    --python_version) python_version=$2 ;;
    --out) out=$2 ;;
    *)
        echo "error: $1 is no option of pack.sh" >&2
        exit 2
        ;;
    esac
    shift 2
done

platforms=(--implementation cp --only-binary=:all: --python-version "$python_version")
for glibc in 2_17 2_24 2_26 2_27 2_28 2_31 2_34 2_35; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
rm -rf "$out"
mkdir -p "$out"

requirements() { # of pyproject.toml, a line each
    "$python" - <<'PYTHON'
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
for requirement in (*project["dependencies"], *extras["fp8"]):
    if not requirement.startswith("datasets"):
        print(requirement)
PYTHON
}

carried() { # NAME==VERSION of what pip would install for these requirements and the machine lacks
    "$python" -m pip install -qq --dry-run --ignore-installed --target "$scratch/none" --report "$scratch/report" \
        --find-links "$out" --find-links "$scratch" "${platforms[@]}" "$@" >&2
    "$python" - "$scratch/report" "$scratch/requirements" <<'PYTHON'
import json, sys
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name as name_of

report = json.loads(Path(sys.argv[1]).read_text())
found = {name_of(each["metadata"]["name"]): each["metadata"] for each in report["install"]}


def needs(name):
    named = map(Requirement, found[name].get("requires_dist", []))
    asked = [each for each in named if each.marker is None or each.marker.evaluate({"extra": ""})]
    return {name_of(each.name) for each in asked} & found.keys()


machine = {"torch", "triton", "transformers", "accelerate"}
machine |= set().union(*map(needs, machine))
left = {name_of(Requirement(line).name) for line in Path(sys.argv[2]).read_text().splitlines()}
carried = set()
while left:
    name = left.pop()
    if name not in carried | machine:
        carried.add(name)
        left |= needs(name)
print("\n".join(sorted(f"{name}=={found[name]['version']}" for name in carried - {"deepspeed"})))
PYTHON
}

empty_wheels() { # of torch and triton, at versions of their own, without what comes from NVIDIA
    "$python" - "$scratch" "${on_machine[@]:0:2}" <<'PYTHON'
import sys, zipfile

needs = {"torch": ["filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions"]}
for pin in sys.argv[2:]:
    name, version = pin.split("==")
    stem = f"{name}-{version}+there"
    with zipfile.ZipFile(f"{sys.argv[1]}/{stem}-py3-none-any.whl", "w") as wheel:
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}+there"]
        lines += [f"Requires-Dist: {need}" for need in needs.get(name, [])]
        wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join(lines) + "\n")
        tag = "Wheel-Version: 1.0\nGenerator: pack.sh\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{stem}.dist-info/WHEEL", tag)
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
PYTHON
}

empty_wheels
there=("${on_machine[0]}+there" "${on_machine[1]}+there" "${on_machine[@]:2}")
requirements >"$scratch/requirements"
deepspeed=$(grep '^deepspeed' "$scratch/requirements" | cut -d';' -f1)
DS_BUILD_OPS=0 "$python" -m pip wheel -qq --no-deps -w "$out" "$deepspeed"
mapfile -t wanted < <(cut -d';' -f1 "$scratch/requirements")
mapfile -t carried < <(carried "${there[@]}" "${wanted[@]}")
"$python" -m pip download -qq --no-deps -d "$out" "${platforms[@]}" "${carried[@]}"

if ! compgen -G "$out/deepspeed-*-py3-none-any.whl" >/dev/null; then
    echo "error: DeepSpeed's wheel is for this machine only: $(ls "$out" | grep deepspeed)" >&2
    exit 1
fi
num_bytes=$(cat "$out"/*.whl | wc -c)
if ((num_bytes > max_mib * 2 ** 20)); then
    echo "error: $out has $((num_bytes / 2 ** 20)) MiB, more than the $max_mib MiB that may travel" >&2
    echo "hint: leave out an extra" >&2
    exit 1
fi
printf '%s: %d wheels, %.1f MiB\n' "$out" "$(ls "$out" | wc -l)" "$(echo "$num_bytes" | awk '{ print $1 / 2^20 }')"
ls "$out" | sed 's/^/    /'
install="python3 -m pip install -q --no-index --no-deps --no-compile --target \$HOME/site $out/*.whl"
echo "there, from this folder; a later call goes on, on a fresh machine after unpacking the archive into \$HOME/measured:"
echo "    [ -d \$HOME/site ] || $install; export PYTHONPATH=\$HOME/site:\$PWD;" \
    "python3 bench/gpu/measure.py --budget_minutes 9 --out \$HOME/measured --archive \"\$OUT\""
