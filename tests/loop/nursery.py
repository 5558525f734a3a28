"""Body of a process that has imported everything and forks one fresh process per command.

Starting Python and importing torch, transformers and diffusers takes several seconds; with this a test pays it once.
A request is a line of JSON on standard input, the answer one on standard output: a command to start (answer: its pid),
or a pid to wait for (answer: its exit code, negative for a signal).
"""

import atexit
import gc
import importlib
import json
import os
import resource
import sys
import traceback

PRELOADED = (
    "diffusers.loaders.lora_pipeline",
    "diffusers.pipelines.flux2.pipeline_flux2",
    "matplotlib.figure",
    "polars",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "cast_engine.judges.hf_judge",
    "cast_engine.models.flux2",
    "cast_engine.pipeline",
    "cast_engine.stages.report",
    "trainer.loop",
)


def become(request):
    """Turn this forked process into the one that was asked for."""
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    for number, name in enumerate((os.devnull, request["stdout"], request["stderr"])):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    if request["file_limit"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"],) * 2)
    sys.argv = request["argv"]


def serve():
    """Answer requests until there are no more; return the program to run in a child, None in the parent."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # a collection would copy every page in every child
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        if "wait" in request:
            answer = {"code": os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])}
        else:
            pid = os.fork()
            if pid == 0:
                become(request)
                return request["program"]
            answer = {"pid": pid}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return None


def run(program):
    """Run a command to its end and leave without taking the interpreter to pieces, which would copy all its pages."""
    import cast_engine.cli
    import trainer.cli

    code = 0
    try:
        {"cast-engine": cast_engine.cli.main, "cast-train": trainer.cli.main}[program]()
    except SystemExit as leave:
        code = int(leave.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__" and (program := serve()) is not None:
    run(program)
