# --task t2v-99B
python wan_train_network.py --task t2v-99B
