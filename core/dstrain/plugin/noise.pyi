from dstrain.graph.noise_process import (
    Diffusion as Diffusion,
    MakeSampler as MakeSampler,
    NoiseProcess as NoiseProcess,
    Prediction as Prediction,
    Sampler as Sampler,
)
from dstrain.pipeline.sampler import diffusers_sampler as diffusers_sampler
