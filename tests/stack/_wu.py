import sys; sys.argv=["x","V2"]
import os
os.environ["VLLM_USE_V2_MODEL_RUNNER"]="1"
from tests.stack import as_on_cuda
as_on_cuda.interpret_triton()
import time
from tests.stack.harness import build_engine
from ngrpo import models
b=time.time()
with as_on_cuda.asynchronous():
    llm=build_engine(models.resolve("smollm2-135m"),{"name":"neighbor","rate":0.5},max_num_batched_tokens=64,max_num_seqs=4,max_model_len=256,enable_prefix_caching=True)
    print("built",time.time()-b)
    print(as_on_cuda.warm_up(llm), time.time()-b)
os._exit(0)
