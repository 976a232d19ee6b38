# Z-Image
python zimage_train_network.py --dit a.safetensors
