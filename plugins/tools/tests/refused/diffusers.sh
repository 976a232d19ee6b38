# diffusers
accelerate launch train_dreambooth_lora_flux.py --rank 4
