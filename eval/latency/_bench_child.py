"""vLLM's serving benchmark, several times in one process, which spares its slow import.

Arguments: a JSON file with a list of argument lists. Started by `zaya.eval.latency.bench`; needs nothing of ours.
"""

import json
import sys

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as f:
        runs = json.load(f)
    for argv in runs:
        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        main(parser.parse_args(argv))
