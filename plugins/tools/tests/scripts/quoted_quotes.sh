# {"prompt": ["a dog,\n  a \"cat\""], "c": ["2"]}
python train.py --prompt "a dog,
  a \"cat\"" \
  --c 2
