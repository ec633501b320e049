"""transformers' generate. Arguments: MODEL_DIR DTYPE THREADS REPEATS BEGAN."""

import json
import sys
import time

import torch
from points import prompt, rates
from transformers import AutoModelForCausalLM

folder, dtype, threads, repeats, began = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
torch.set_num_threads(threads)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def seconds(count, tokens, new_tokens, round_=0):
    ids = torch.tensor([prompt(index, tokens, round_) for index in range(count)])
    start = time.perf_counter()
    fixed = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 2}
    model.generate(ids, attention_mask=torch.ones_like(ids), **fixed)
    return time.perf_counter() - start


with torch.inference_mode():
    found = {"start_s": round(time.time() - began, 2)}
    seconds(1, 32, 4)
    found |= rates(seconds, repeats)
print(json.dumps(found))
