"""Weights as quantized checkpoints have them: held packed, dequantized for each product, in torch on any device.

    config.json  ->  read_scheme()  ->  Scheme  ->  transformers loads the tensors into the scheme's linear layers

The files, in that order:

    formats             the table of formats: a checkpoint's quantization_config to the scheme of its family
    scheme              which linear layers of a model are quantized, and as which module
    quantizer           transformers' loading with the modules of a scheme
    compressed_tensors, float8, gptq, awq, torchao, bitsandbytes   one family each: reads its configuration
    at_load             plain weights, quantized once they are loaded
    scaled_linear       weights of 8 bits times scales
    products            products with them that write no dequantized weight, by torch
    scaled_product      the same in kernels of a GPU
    kv_cache            scales of keys and values that a checkpoint has
    packed_linear       weights of 2, 4 or 8 bits in words of 32
    int4_product        those of 4 bits packed anew for the kernels of a GPU
    product_trial       the trial of a kernel's product at start
    mxfp4               experts of 4 bits
    experts             the weights of a mixture's experts, one at a time
    quantized_linear    the linear layer that all formats have in common
    quantized_module    the buffers of layers and experts, and their check
    inputs              activations, rounded as a format with quantized inputs rounds them
"""
