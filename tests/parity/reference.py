"""Runs in the test-only environment (torch, transformers), never in the learner's: reference answers for the parity tests.

  python reference.py REQUEST.json RESULT_FOLDER

The request names jobs; every job writes RESULT_FOLDER/<name>.npz or .json:
  logits: {"folder", "ids": [[..], ..]} -> logits_<i> [T, V] float32, log_probs_<i> [T - 1] of the next ids
  tokenizer: {"folder", "texts": [..], "conversations": [[message, ..], ..]} -> ids of each, decoded texts, rendered texts
  shards: {"folder", "target", "max_shard_size"} -> saves the model again with transformers, sharded
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers


def logits(job, target):
  model = transformers.AutoModelForCausalLM.from_pretrained(job['folder'], dtype=torch.float32).eval()
  arrays = {}
  with torch.no_grad():
    for i, ids in enumerate(job['ids']):
      out = model(torch.tensor([ids])).logits[0]
      arrays[f'logits_{i}'] = out.numpy()
      arrays[f'log_probs_{i}'] = out[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
  np.savez(target.with_suffix('.npz'), **arrays)


def tokenizer(job, target):
  tok = transformers.AutoTokenizer.from_pretrained(job['folder'])
  ids = [tok(t, add_special_tokens=False)['input_ids'] for t in job['texts']]
  render = lambda c, **kw: tok.apply_chat_template(c, add_generation_prompt=c[-1]['role'] != 'assistant', **kw)
  target.with_suffix('.json').write_text(json.dumps({
      'ids': ids, 'decoded': [tok.decode(i, clean_up_tokenization_spaces=False) for i in ids], 'eos': tok.eos_token_id,
      'pad': tok.pad_token_id, 'rendered': [render(c, tokenize=False) for c in job['conversations']],
      'rendered_ids': [render(c, tokenize=True, return_dict=False) for c in job['conversations']]}))


def shards(job, target):
  model = transformers.AutoModelForCausalLM.from_pretrained(job['folder'], dtype=torch.float32)
  model.save_pretrained(job['target'], max_shard_size=job['max_shard_size'])


if __name__ == '__main__':
  torch.set_num_threads(2)
  results = pathlib.Path(sys.argv[2])
  for name, job in json.loads(pathlib.Path(sys.argv[1]).read_text()).items():
    {'logits': logits, 'tokenizer': tokenizer, 'shards': shards}[job['kind']](job, results / name)
