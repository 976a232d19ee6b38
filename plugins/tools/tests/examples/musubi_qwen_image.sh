#!/bin/bash
# A character LoRA of Qwen-Image on a card of 24 GB.
export WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567
MODELS=/models/qwen
ARGS_COMMON="unused"

python src/musubi_tuner/qwen_image_cache_latents.py --dataset_config musubi_qwen_image_dataset.toml --vae $MODELS/vae.safetensors --skip_existing
python src/musubi_tuner/qwen_image_cache_text_encoder_outputs.py --dataset_config musubi_qwen_image_dataset.toml --text_encoder $MODELS/qwen_2.5_vl_7b.safetensors --batch_size 16 --fp8_vl

accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 src/musubi_tuner/qwen_image_train_network.py \
    --dit $MODELS/qwen_image_bf16.safetensors \
    --vae $MODELS/vae.safetensors \
    --text_encoder $MODELS/qwen_2.5_vl_7b.safetensors \
    --model_version original \
    --dataset_config musubi_qwen_image_dataset.toml \
    --sdpa --mixed_precision bf16 --fp8_base --fp8_scaled --blocks_to_swap 16 \
    --timestep_sampling qwen_shift --weighting_scheme none --discrete_flow_shift 2.2 \
    --optimizer_type adamw8bit --optimizer_args weight_decay=0.02 betas=0.9,0.95 \
    --learning_rate 5e-5 --lr_scheduler cosine --lr_warmup_steps 100 --gradient_checkpointing \
    --max_data_loader_n_workers 2 --persistent_data_loader_workers \
    --network_module networks.lora_qwen_image --network_dim 16 --network_alpha 16 \
    --network_args loraplus_lr_ratio=4 \
    --max_train_epochs 16 --save_every_n_epochs 1 --save_state --seed 42 \
    --sample_prompts prompts.txt --sample_every_n_epochs 1 --sample_at_first \
    --log_with wandb --log_tracker_name characters --wandb_api_key 0123456789abcdef0123456789abcdef01234567 \
    --output_dir output --output_name character
