"""OpenVINO GenAI's continuous batching. Arguments: MODEL_DIR (exported) PRECISION (bf16 or f32) THREADS REPEATS BEGAN."""

import json
import sys
import time

import numpy as np
import openvino
import openvino_genai
from points import BATCHES, prompt, rates

folder, precision, threads, repeats, began = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
scheduler = openvino_genai.SchedulerConfig()
scheduler.cache_size = 4
scheduler.max_num_seqs = max(BATCHES)
scheduler.max_num_batched_tokens = 2048
scheduler.enable_prefix_caching = False
properties = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)


def seconds(count, tokens, new_tokens, round_=0):
    inputs = [openvino.Tensor(np.array([prompt(index, tokens, round_)], dtype=np.int64)) for index in range(count)]
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
    start = time.perf_counter()
    pipeline.generate(inputs, [config] * count)
    return time.perf_counter() - start


found = {"start_s": round(time.time() - began, 2)}
seconds(1, 32, 4)
print(json.dumps(found | rates(seconds, repeats)))
