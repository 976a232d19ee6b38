# Krea 2
python krea2_train_network.py --dit a.safetensors
