accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 src/musubi_tuner/flux_2_train_network.py \
    --model_version klein-base-4b --dit /models/flux-2-klein-base-4b.safetensors \
    --vae /models/ae.safetensors --text_encoder /models/qwen_3_4b.safetensors \
    --dataset_config musubi_kontext_dataset.toml \
    --sdpa --mixed_precision bf16 --fp8_base --fp8_scaled --fp8_text_encoder \
    --timestep_sampling flux2_shift --weighting_scheme none \
    --optimizer_type adamw8bit --learning_rate 1e-4 --gradient_checkpointing \
    --network_module networks.lora_flux_2 --network_dim 32 --network_alpha 32 \
    --max_train_steps 2000 --save_every_n_steps 500 --seed 42 \
    --output_dir output --output_name edits
