accelerate launch --mixed_precision bf16 flux_train.py \
  --pretrained_model_name_or_path /models/flux1-dev.safetensors --clip_l /models/clip_l.safetensors \
  --t5xxl /models/t5xxl_fp16.safetensors --ae /models/ae.safetensors \
  --dataset_config kohya_flux_dataset.toml --full_bf16 --mixed_precision bf16 \
  --optimizer_type adafactor --fused_backward_pass --learning_rate 5e-5 --max_train_steps 1000 \
  --blocks_to_swap 8 --cpu_offload_checkpointing --timestep_sampling flux_shift --sdpa \
  --highvram --output_dir output --output_name whole
