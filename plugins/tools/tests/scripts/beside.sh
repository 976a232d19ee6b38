# {"name": ["a#2"], "seed": ["42"]}
cd tool && python train.py --name a#2 --seed 42 2>&1 | tee log.txt # --x 1
echo done; echo "# no comment" > note.txt
