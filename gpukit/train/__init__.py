"""Training a GPT: `gpukit train --preset tiny`. To be read in this order:

model       the GPT, and the table of operations that kernels of gpukit.kernels can replace
tokenizer   text into numbers and back (byte-pair encoding), and how its vocabulary is learned
data        text that is on every machine, tokenized once; batches drawn from it
optimizer   AdamW, PyTorch's or gpukit's, with clipping
loop        the loop: steps, evaluation, samples, checkpoints, what happens to NaN and to Ctrl-C
checkpoint  written whole or not at all, checked when read
record      the folder of a run: config.json, metrics.csv, samples.txt
compiled    the first loss of a compiled model, beside the model's own
ranks       what several processes (torchrun) tell each other
presets     tiny, gpt2, gpt-1.3b, llama-1b as data; plan: what each takes, before it starts
ladder      one step made fast by one change at a time, predicted and measured; fp8: products in 8 bits
command     the command's options
"""
