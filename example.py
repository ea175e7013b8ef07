"""A chain of thought of any length in a cache of 192 rows."""

from kvcomp import CompressedCache
from kvcomp.evict import VaSE
from kvcomp.models import encode, load

model, tokenizer = load("smollm2-135m")  # or a hub id, such as "Qwen/Qwen3-0.6B"
inputs = encode(tokenizer, "Explain, step by step, how to find all primes below 50.")
cache = CompressedCache(model, VaSE(budget=192), seed=0)
output = model.generate(**inputs, cache=cache, max_new_tokens=1500, do_sample=False)
print(tokenizer.decode(output[0, -60:]))
print(cache.memory())
