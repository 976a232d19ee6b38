# a ControlNet of SDXL
accelerate launch sdxl_train_control_net_lllite.py --pretrained_model_name_or_path a.ckpt
