"""Run commands through the installed entry point, many in one process, because importing torch takes seconds.

Standard input: JSON lists ``[script, *arguments]``. Standard output: for each a JSON ``[status, output, CPU seconds]``,
those of its children included.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import traceback

from moe_ep_bench.analysis import page, style


def run(script: str, arguments: list[str]) -> tuple[int, str, float]:
    """The exit status of a script, and the last of what it and its children wrote to either stream."""
    start, sys.argv = sum(os.times()[:4]), [script, *arguments]
    with tempfile.TemporaryFile() as written:
        streams = [os.dup(1), os.dup(2)]
        os.dup2(written.fileno(), 1)
        os.dup2(written.fileno(), 2)
        try:
            runpy.run_path(script, run_name="__main__")
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
            status = 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, stream in enumerate(streams, start=1):
                os.dup2(stream, number)
                os.close(stream)
        written.seek(0)
        return status, written.read()[-3000:].decode(errors="replace"), sum(os.times()[:4]) - start


if __name__ == "__main__":
    style.DEFAULT_FORMATS = ("svg",)  # a PNG takes as long again
    page._drawn = lambda store: ()  # figures have tests of their own
    for line in sys.stdin.read().splitlines():
        script, *arguments = json.loads(line)
        print(json.dumps(run(script, arguments)), flush=True)
