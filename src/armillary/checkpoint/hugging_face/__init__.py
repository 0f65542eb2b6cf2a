"""Weights in and out: Hugging Face format to our names and back, without holding them in memory.

source     tensors that are read when they are asked for, a box at a time
files      a folder of safetensors files as sources; own: a checkpoint of ours
views      sources made of sources: transposed, stacked, reordered, dequantised ...
table      rules between names of ours and of theirs, read both ways
families   for each family its table, and config.json to a model and back; facts: reading one
weights    from an address to sources by our names, or to what is wrong with them
load       into a model on any mesh; every rank reads what it holds
writing    shards and checkpoints from sources; exporting: whole folders; tokenizer: its files
check      our modules against an independent reference, on the weights of an import
"""
