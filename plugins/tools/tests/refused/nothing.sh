# nothing.sh: 
echo hello
