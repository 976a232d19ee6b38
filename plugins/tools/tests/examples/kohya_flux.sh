# A LoRA of FLUX.1-dev on folders of sd-scripts' layout.
accelerate launch --num_cpu_threads_per_process 1 flux_train_network.py \
  --pretrained_model_name_or_path="/models/flux1-dev.safetensors" \
  --clip_l="/models/clip_l.safetensors" \
  --t5xxl="/models/t5xxl_fp16.safetensors" \
  --ae="/models/ae.safetensors" \
  --train_data_dir="train" --reg_data_dir="reg" --prior_loss_weight=0.5 \
  --resolution="512,512" --enable_bucket --min_bucket_reso=256 --max_bucket_reso=1024 \
  --caption_extension=".txt" --shuffle_caption --keep_tokens=1 --flip_aug --random_crop \
  --output_dir="output" --output_name="dog" --save_model_as=safetensors \
  --network_module=networks.lora_flux --network_dim=16 --network_alpha=8 --network_train_unet_only \
  --learning_rate=1e-4 --unet_lr=1e-4 --text_encoder_lr=5e-5 \
  --optimizer_type="AdamW8bit" --lr_scheduler="cosine_with_restarts" --lr_scheduler_num_cycles=3 \
  --sdpa --max_train_epochs=10 --save_every_n_epochs=2 --mixed_precision="bf16" \
  --gradient_checkpointing --guidance_scale=1.0 --timestep_sampling="shift" \
  --discrete_flow_shift=3.1582 --model_prediction_type="raw" --blocks_to_swap=18 \
  --cache_text_encoder_outputs --cache_latents_to_disk --fp8_base --apply_t5_attn_mask
