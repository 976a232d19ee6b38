accelerate launch --config_file examples/flux/model_training/full/accelerate_config.yaml examples/flux/model_training/train.py \
  --dataset_base_path photos \
  --dataset_repeat 100 --height 512 --width 512 \
  --model_id_with_origin_paths "black-forest-labs/FLUX.1-dev:flux1-dev.safetensors,black-forest-labs/FLUX.1-dev:text_encoder/model.safetensors,black-forest-labs/FLUX.1-dev:text_encoder_2/*.safetensors,black-forest-labs/FLUX.1-dev:ae.safetensors" \
  --learning_rate 1e-4 --num_epochs 2 \
  --remove_prefix_in_ckpt "pipe.dit." --output_path "./models/train/flux" \
  --lora_base_model "dit" --lora_target_modules "a_to_qkv,b_to_qkv,ff_a.0,ff_a.2" --lora_rank 16 \
  --align_to_opensource_format --use_gradient_checkpointing \
  --enable_optimizer_cpu_offload --wandb_project flux
