# unknown.sh: 
python train.py --config a.toml
