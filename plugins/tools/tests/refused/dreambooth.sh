# Stable Diffusion
accelerate launch train_db.py --max_train_steps 9
