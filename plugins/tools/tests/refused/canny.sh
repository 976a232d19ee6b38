# FLUX.1-Canny-dev
python examples/flux/model_training/train.py --model_id_with_origin_paths black-forest-labs/FLUX.1-Canny-dev:a.safetensors
