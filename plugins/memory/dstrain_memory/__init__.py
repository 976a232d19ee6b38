"""Keep weights in less memory: in fewer bytes, in RAM, in tiles; and compile blocks.

`dstrain_memory.quantization.methods.add_method` adds a method to `--quant_options`.
"""
