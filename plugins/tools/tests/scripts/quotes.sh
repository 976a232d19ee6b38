# {"a": ["x | y; > z"], "b": ["#tag"], "c": ["#1"]}
python train.py --a 'x | y; > z' --b "#tag" --c \#1
