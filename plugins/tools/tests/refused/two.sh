# --command 2
python wan_train_network.py --task t2v-14B
python wan_train_network.py --task t2v-14B
