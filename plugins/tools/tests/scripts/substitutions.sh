# {"a": ["x $(echo \"y; z\" | tr \"(\" \")\")"], "b": ["$(a \"$(b)\")"], "c": ["1"]}
python train.py --a "x $(echo "y; z" | tr "(" ")")" --b "$(a "$(b)")" --c 1
