"""Keep weights in less memory: in fewer bytes, in RAM, in tiles; and compile blocks.

Other plugins add methods to `--quant_options` by the entry-point group `dstrain.quantizers`:
each entry names a `dstrain_memory.quantization.method.QuantizationMethod`.
"""
