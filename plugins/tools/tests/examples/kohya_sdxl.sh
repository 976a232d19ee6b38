# A LoRA of Illustrious, in the U-Net and in both text encoders, on folders of sd-scripts' layout.
accelerate launch --num_cpu_threads_per_process 1 sdxl_train_network.py \
  --pretrained_model_name_or_path="/models/Illustrious-XL-v1.0.safetensors" --vae="/models/sdxl_vae.safetensors" \
  --min_snr_gamma=5 --clip_skip=2 --max_token_length=225 \
  --train_data_dir="train" --reg_data_dir="reg" \
  --resolution="1024,1024" --enable_bucket --min_bucket_reso=256 --max_bucket_reso=2048 --bucket_no_upscale \
  --caption_extension=".txt" --shuffle_caption --keep_tokens=1 --flip_aug \
  --output_dir="output" --output_name="dog" --save_model_as=safetensors --save_precision="bf16" \
  --network_module=networks.lora --network_dim=32 --network_alpha=16 \
  --network_args "conv_dim=16" "conv_alpha=8" \
  --learning_rate=1e-4 --unet_lr=1e-4 --text_encoder_lr=5e-5 \
  --optimizer_type="AdamW8bit" --lr_scheduler="cosine" --lr_warmup_steps=100 \
  --max_train_steps=2000 --save_every_n_steps=500 --mixed_precision="bf16" --no_half_vae \
  --gradient_checkpointing --xformers --noise_offset=0.0357 \
  --cache_latents_to_disk --debiased_estimation_loss --seed=42
