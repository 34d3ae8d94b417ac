#!/bin/sh
# What an image's Python finds installed, as a CycloneDX SBOM: sbom.sh IMAGE TOOLS > IMAGE.cdx.json
# TOOLS is a folder that holds cyclonedx-bom, made for the image's version of Python; the image itself stays as it is:
#   python3 -m pip install --target TOOLS cyclonedx-bom==7.5.0
# A wheel that an image carries in /out, as the plugin's does, counts as installed. Debian's own packages are not in it.
set -eu
[ $# = 2 ] || { echo "usage: sbom.sh IMAGE TOOLS" >&2; exit 2; }
tools=$(cd "$2" && pwd)
# The Python that is looked at is another process, which does not have /sbom on its path.
exec docker run --rm --read-only --network none --user 65532:65532 --volume "$tools:/sbom:ro,z" --entrypoint python3 "$1" -c '
import glob, os, runpy, sys
os.environ["PYTHONPATH"] = ":".join(glob.glob("/out/*.whl"))
sys.path.insert(0, "/sbom")
options = ["--output-reproducible", "--no-validate", "--output-format", "JSON"]
sys.argv = ["cyclonedx-py", "environment", *options, sys.executable]
runpy.run_module("cyclonedx_py", run_name="__main__", alter_sys=True)
'
