# line 2
python 'train.py
