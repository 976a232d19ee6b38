# {"a": ["x\ny"], "b": ["1"]}
python train.py --a 'x
y' \
  --b 1 # don't stop
