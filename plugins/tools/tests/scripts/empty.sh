# {"a": [""], "b": [""], "c": ["1"]}
python train.py --a "" --b '' --c 1
