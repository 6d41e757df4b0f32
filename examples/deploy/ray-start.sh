#!/bin/sh
# Starts Ray on one node of a cluster that vLLM will use. Arguments are those of `ray start`:
#
#   ray-start.sh --head --port 6379          on the first node
#   ray-start.sh --address FIRST_NODE:6379   on every other
#
# Its workers get this environment, so the folder has to be on every node and is set here. To set it
# for a single job instead: ray job submit --runtime-env-json
#   '{"env_vars": {"PYTHONPATH": "/opt/altay-kvfix"}}' -- vllm serve ...
set -eu
folder=${ALTAY_KVFIX_FOLDER:-/opt/altay-kvfix}
export PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}"
exec ray start "$@"
