-- write: one command on one key, carried out by a server whose memory is full, too.
-- KEYS[1]  the key
-- ARGV[1]  the command
-- ARGV[2]  what follows the key in it, and so on
-- Returns  what the command returns
-- Cost     that of the command, and about 3 us
-- Race     none that the command does not have by itself.
return redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))
