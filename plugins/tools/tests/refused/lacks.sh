# no.toml
python wan_train_network.py --dataset_config no.toml
