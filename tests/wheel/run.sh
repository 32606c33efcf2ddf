# SPDX-License-Identifier: Apache-2.0
# sh run.sh WHEEL PYTHON FOLDER: installs the wheel in an environment of its own under FOLDER and tests it there, where
# no source can take its place. What it depends on is taken from PYTHON's environment.
set -eu
wheel=$(realpath "$1") python=$2 folder=$3 tests=$(realpath "$(dirname "$0")/..")
"$python" -m venv "$folder/venv"
site=$("$folder/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
"$folder/venv/bin/python" -m pip install --quiet --no-deps "$wheel"
# A path from a .pth file comes after this environment's own packages, and .pth files found there are not followed.
"$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))' > "$site/dependencies.pth"
cp -r "$tests" "$tests/../csrc" "$folder" # csrc: the extension says what it was built from
mkdir "$folder/build"
cp -r "$tests/../build/redis" "$tests/../build/verbs" "$folder/build" # what the tests of tiers start and load
rm -rf "$folder/tests/demo" # needs torch
cd "$folder"
"$folder/venv/bin/python" -m tests.wheel.check "$site"
"$folder/venv/bin/python" -m pytest -q --import-mode=importlib -p no:cacheprovider -o pythonpath=. -o asyncio_mode=auto \
    tests/transfer tests/tiers tests/wire tests/conformance tests/e2e/test_round_trips.py
