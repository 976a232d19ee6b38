# SDXL
accelerate launch sdxl_train_network.py --pretrained_model_name_or_path a.ckpt
